"""Pictures and pages of what was planned, measured or simulated."""
