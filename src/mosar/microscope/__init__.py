"""The routing microscope: what every token of a text chose, what it reads, what it leaves out."""
