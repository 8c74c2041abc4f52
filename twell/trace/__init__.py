"""Which neurons are active for which token, recorded from a model.

A `Trace` holds every active neuron of every token and layer, and its value h. Its size is
proportional to the number of tokens. An `Aggregate` has a fixed size: counts over all tokens,
exact, and for each neuron a few places in the text.

    records     the two records, their methods and files
    texts       from text to token ids, and back to the string of each token
    counter     the observers that fill an aggregate
    tracing     runs a model for traces and aggregates of texts, sequences and runs; the loss
                without a neuron
    neurons     where single neurons fire, and the token each is most specific to

The public functions load at first use: reading a file loads neither torch nor transformers.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".counter": "CONTEXTS SAMPLE",
        ".neurons": "places specific",
        ".records": "Aggregate BLOCKS COMPRESSIONS OCTAVES TILE_N Trace",
        ".texts": "cut encode held_out load_with_tokenizer token_strings",
        ".tracing": "BATCH_TOKENS BYTES_A_NEURON MAX_BYTES aggregate aggregate_run "
        "scaled_logprob silenced_loss trace_text trace_tokens trace_validation",
    },
)
