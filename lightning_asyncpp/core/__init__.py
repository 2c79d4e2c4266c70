"""The heart of the package: schedules, weight versions, transport and updates, in plain torch."""
