"""One decode step: draft, plan, flatten, verify, accept, commit."""
