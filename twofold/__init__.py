"""Twofold trains language-model programs: their prompts and their weights, together."""
