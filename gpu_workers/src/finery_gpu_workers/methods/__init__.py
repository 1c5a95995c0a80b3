"""The loops, one per method, and the preparation that comes before them."""
