"""Work on the bytes of this node, outside the event loop."""
