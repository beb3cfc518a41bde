"""The names of this package under their former module; import them from the modules that define them."""

from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.rank_file import RankTokenizer
from titan.dataset.tokenizers.tokenizer import END, Tokenizer

__all__ = ["END", "RankTokenizer", "Tokenizer", "load_tokenizer"]
