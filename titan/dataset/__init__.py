"""The dataset axis: from text to batches, with the same rows whatever the number of ranks.

Preparation, once per corpus (`python -m titan.prepare`, or at a run's start):

1. `schema`: the settings; `build()` gives a source. `sources/` reads files, the hub, chats or a generator as
   `documents` (the interface for your own source).
2. `preprocess/plan`: the source's content, the tokenizer and the settings give a digest, a folder in the cache, and
   its division into shard jobs.
3. `preprocess/prepare` runs the shard jobs in several processes, on several machines if they share the cache;
   `corpora` does so while training runs.
4. `preprocess/shard_job`: each document is tokenized (`preprocess/encode`, `tokenizers/`), assigned to the training or
   the validation split by its hash, shuffled within a buffer and written (`preprocess/writer`).
5. `preprocess/prepare` counts documents, tokens and duplicates; the manifest is written last.

Reading, in each step of a run:

6. `corpora` opens the prepared folders (`shards`; those of a URL through `remote`) and builds the mixture.
7. `mixture` maps each row number to a corpus and a row of it, and `permutation` maps that to the row
   on disk. Both are pure functions of an index: a resume needs only the number of rows read.
8. `loader` reads this rank's rows of each step in a background thread and lays them out as micro-batches.
"""
