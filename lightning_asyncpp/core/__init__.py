"""Core of the package, in plain torch: schedules, weight versions, transport and updates."""
