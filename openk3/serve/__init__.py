"""HTTP over the engine: the routes that OpenAI's and Anthropic's clients speak, and what keeps them apart."""
