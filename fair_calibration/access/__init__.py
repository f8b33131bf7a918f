"""How the attention of a model is reached: it knows neither the settings nor the method."""
