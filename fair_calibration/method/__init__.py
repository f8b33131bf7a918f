"""What calibration does to attention rows: pure tensor code, which knows no model."""
