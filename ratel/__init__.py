"""Tools of many MCP servers as one ranked catalog."""
