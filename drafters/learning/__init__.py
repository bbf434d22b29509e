"""Train the drafter on served answers: keep answers, train in idle time, and pass a gate before any exchange."""
