"""What one keeper decides for the whole job. Pure: no clock, socket, file or thread."""
