"""What one node decides. Pure: no clock, socket, file or thread."""
