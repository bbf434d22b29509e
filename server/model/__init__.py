"""The target model: where it comes from, its files and their formats."""
