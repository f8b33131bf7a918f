"""How the attention of a model is reached, without knowing the settings or what is done to the attention."""
