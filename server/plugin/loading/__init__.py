"""From the plugin's configuration to the drafter and the planner."""
