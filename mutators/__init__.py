"""What proposes new branches: rules, crossover, an LLM."""
