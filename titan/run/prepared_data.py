"""The data of a run: prepare them, and check that its model and batch can use them. Free of torch.

This comes before an attempt begins, and may take hours. It writes nothing into the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.run.run import Run


@dataclass(frozen=True)
class PreparedData:
    """The prepared data of a run.

    Attributes:
        folders: the folder of each prepared corpus, by name.
        mix: all rows that the run may read.
    """

    folders: corpora.Folders
    mix: RowMixture


def prepare_data(run: Run, progress: Callable[[str], None] | None = None) -> PreparedData:
    """Prepare what is missing of a run's data, and open them.

    Raises:
        ConfigError: when the data, or the model or the batch with these data, can't be used.
    """
    folders = corpora.prepare_corpora(run.dataset, progress)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(folders))
    _check_data(run, mix)
    return PreparedData(folders, mix)


def _check_data(run: Run, mix: RowMixture) -> None:
    """Raise ConfigError for data that the model or the batch can't use; the message names both sides."""
    for rows in mix.sources:
        corpus = rows.corpus
        if corpus.max_token >= run.model.vocab:
            raise ConfigError(
                f"model.vocab={run.model.vocab}: the data has token ids up to {corpus.max_token} "
                f"(tokenizer {corpus.tokenizer['name']}); give model.vocab={corpus.vocab_size} or another tokenizer."
            )
        if corpus.complete and rows.split.count_rows(run.training.seq_len) < 1:
            raise ConfigError(
                f"training.seq_len={run.training.seq_len}: the training data has only {rows.split.tokens} tokens, "
                "less than one row; give a smaller training.seq_len or more data."
            )
    corpora.check_epochs(run.dataset, run.training, mix)
