"""Text on its way in and out: tokenizer, chat template, incremental detokenizer, stop strings. Without torch and numpy."""

from twostep.text.chat_template import ChatTemplate
from twostep.text.detokenizer import Detokenizer
from twostep.text.model_card import GenerationDefaults, ModelCard
from twostep.text.stop_strings import StopStrings
from twostep.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "GenerationDefaults", "ModelCard", "StopStrings", "Tokenizer"]
