"""What calibration does to attention rows. Most of it is plain tensor code that knows nothing of the model."""
