"""Running what customers wrote: without network, secrets, or a life longer than it was given."""
