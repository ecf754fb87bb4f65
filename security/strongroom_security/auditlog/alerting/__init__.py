"""The parts of early warnings: what an alert is, its rules, and what they are set to."""
