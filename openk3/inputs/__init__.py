"""Messages, images and video become tokens and patches."""
