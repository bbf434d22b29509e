"""Who decides how many draft tokens of each request are verified."""
