"""A drafter that learns from what is served: answers kept, training in idle time, a gate before any exchange."""
