"""Text on its way in and out: tokenizer, chat template, incremental detokenizer, stop strings. Without torch and numpy."""
