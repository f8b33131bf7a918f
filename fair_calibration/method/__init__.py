"""What calibration does to attention rows. Most of it is plain tensor code that does not depend on the model."""
