"""The `strongroom` command."""
