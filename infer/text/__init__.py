"""What callers see of the engine: text for requests, one by one, in a chat, or from a file of prompts."""
