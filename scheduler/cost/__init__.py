"""What a decode step costs: measured step times and the model made of them."""
