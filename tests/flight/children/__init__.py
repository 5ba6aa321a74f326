"""Programs that the flight tests start and kill."""
