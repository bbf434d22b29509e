"""Makes the drafter and the planner from the plugin's configuration."""
