"""What happens when a rank fails: all others end, and the first cause stays the first."""
