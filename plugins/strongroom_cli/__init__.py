"""The ``strongroom`` command: looks at runs and verifies them. `strongroom_cli.main` is its entry."""
