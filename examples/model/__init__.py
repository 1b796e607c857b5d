"""The tiny model of the quickstart: tokenizer, demonstrations, and the command that makes them and the weights."""
