"""Fields by which other servers' clients change an answer, and which are not done here: a row of each, with what to do instead.

A value that switches the feature off is accepted, since clients send those by default. Fields that change no answer have no row: unknown
fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from router.http.body import Body, Unsupported

_LARK = "use structured_outputs.grammar, in the dialect of Lark"
_LENGTH = "use max_tokens"
_LORA = "adapters are not served here; merge the adapter into the weights, or leave it out"
_SAMPLER = "sample by temperature, top_p, top_k and min_p; leave it out"
_REPEATS = "use repetition_penalty, frequency_penalty or presence_penalty"
_BUDGET = "no budget is kept here; bound the whole answer by max_tokens"
_SEARCH = "the router looks nothing up; leave it out"
_APART = "reasoning comes as `reasoning_content`; include_reasoning false leaves it out"
_TEXT = "models here read text; leave it out"


class ForeignFields(Body):
    """Fields of every endpoint that generates text."""

    # The form of an answer.
    guided_json: Annotated[Any, Unsupported("use structured_outputs.json")] = None
    guided_regex: Annotated[Any, Unsupported("use structured_outputs.regex")] = None
    guided_choice: Annotated[Any, Unsupported("use structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, Unsupported(_LARK)] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported('set "x-guidance": {"whitespace_pattern": ...} in the schema')] = None
    ebnf: Annotated[Any, Unsupported(_LARK, unless="")] = None
    grammar: Annotated[Any, Unsupported(_LARK, unless="")] = None
    format: Annotated[Any, Unsupported("use response_format", unless="")] = None
    response_mime_type: Annotated[Any, Unsupported("use response_format", unless="text/plain")] = None
    response_schema: Annotated[Any, Unsupported("use response_format")] = None
    nvext: Annotated[Any, Unsupported("send its members beside the other fields", unless={})] = None
    options: Annotated[Any, Unsupported("send its members beside the other fields", unless={})] = None

    # Where an answer ends.
    max_new_tokens: Annotated[Any, Unsupported(_LENGTH)] = None
    n_predict: Annotated[Any, Unsupported(_LENGTH, unless=-1)] = None
    num_predict: Annotated[Any, Unsupported(_LENGTH, unless=-1)] = None
    max_tokens_to_sample: Annotated[Any, Unsupported(_LENGTH)] = None
    min_new_tokens: Annotated[Any, Unsupported("use min_tokens", unless=0)] = None
    min_length: Annotated[Any, Unsupported("use min_tokens", unless=0)] = None
    ban_eos_token: Annotated[Any, Unsupported("use ignore_eos", unless=False)] = None
    stop_regex: Annotated[Any, Unsupported("use stop, or hold the answer to structured_outputs.regex", unless=("", []))] = None
    no_stop_trim: Annotated[Any, Unsupported("the text ends before the stop string: `stop_reason` tells it", unless=False)] = None
    include_stop_str_in_output: Annotated[
        Any, Unsupported("the text ends before the stop string: `stop_reason` tells it", unless=False)
    ] = None
    thinking_budget: Annotated[Any, Unsupported(_BUDGET)] = None
    thinking_token_budget: Annotated[Any, Unsupported(_BUDGET)] = None

    # How tokens are chosen.
    do_sample: Annotated[Any, Unsupported("set temperature to 0 for the likeliest tokens", unless=True)] = None
    random_seed: Annotated[Any, Unsupported("use seed")] = None
    repeat_penalty: Annotated[Any, Unsupported("use repetition_penalty", unless=1.0)] = None
    typical_p: Annotated[Any, Unsupported(_SAMPLER, unless=1.0)] = None
    typical: Annotated[Any, Unsupported(_SAMPLER, unless=1.0)] = None
    tfs: Annotated[Any, Unsupported(_SAMPLER, unless=1.0)] = None
    tfs_z: Annotated[Any, Unsupported(_SAMPLER, unless=1.0)] = None
    top_a: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    top_n_sigma: Annotated[Any, Unsupported(_SAMPLER, unless=(-1.0, 0.0))] = None
    mirostat: Annotated[Any, Unsupported(_SAMPLER, unless=0)] = None
    mirostat_mode: Annotated[Any, Unsupported(_SAMPLER, unless=0)] = None
    dynatemp_range: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    dynamic_temperature: Annotated[Any, Unsupported(_SAMPLER, unless=False)] = None
    smoothing_factor: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    epsilon_cutoff: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    eta_cutoff: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    xtc_probability: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    penalty_alpha: Annotated[Any, Unsupported(_SAMPLER, unless=0.0)] = None
    samplers: Annotated[Any, Unsupported(_SAMPLER, unless=[])] = None
    dry_multiplier: Annotated[Any, Unsupported(_REPEATS, unless=0.0)] = None
    no_repeat_ngram_size: Annotated[Any, Unsupported(_REPEATS, unless=0)] = None
    encoder_repetition_penalty: Annotated[Any, Unsupported(_REPEATS, unless=1.0)] = None
    repetition_detection: Annotated[Any, Unsupported(_REPEATS)] = None
    guidance_scale: Annotated[Any, Unsupported(_SAMPLER, unless=1.0)] = None
    negative_prompt: Annotated[Any, Unsupported("leave it out", unless="")] = None
    allowed_token_ids: Annotated[Any, Unsupported("use response_format or structured_outputs to hold the answer to a form", unless=[])] = (
        None
    )
    bad_words: Annotated[Any, Unsupported("leave it out", unless=[])] = None
    banned_strings: Annotated[Any, Unsupported("leave it out", unless=[])] = None
    banned_tokens: Annotated[Any, Unsupported("use logit_bias", unless=("", []))] = None
    custom_token_bans: Annotated[Any, Unsupported("use logit_bias", unless=("", []))] = None
    logits_processors: Annotated[Any, Unsupported("code is not taken from clients; leave it out", unless=[])] = None
    custom_logit_processor: Annotated[Any, Unsupported("code is not taken from clients; leave it out", unless="")] = None
    custom_params: Annotated[Any, Unsupported("it is for a custom_logit_processor; leave it out", unless={})] = None
    vllm_xargs: Annotated[Any, Unsupported("leave it out", unless={})] = None
    use_beam_search: Annotated[Any, Unsupported("beam search is not done here; sample with `n`", unless=False)] = None
    length_penalty: Annotated[Any, Unsupported("it is of beam search, which is not done here; leave it out", unless=1.0)] = None
    watermark: Annotated[Any, Unsupported("leave it out", unless=False)] = None
    lora_path: Annotated[Any, Unsupported(_LORA, unless="")] = None
    lora: Annotated[Any, Unsupported(_LORA, unless=[])] = None
    adapter_id: Annotated[Any, Unsupported(_LORA, unless="")] = None

    # What the model reads.
    truncate_prompt_tokens: Annotated[Any, Unsupported("shorten the prompt before sending it", unless=-1)] = None
    prompt_truncate_len: Annotated[Any, Unsupported("shorten the prompt before sending it")] = None
    truncate: Annotated[Any, Unsupported("shorten the prompt before sending it")] = None
    session_params: Annotated[Any, Unsupported("nothing is kept of a request; send the whole prompt", unless={})] = None
    template: Annotated[Any, Unsupported("templates are not taken from clients; send a whole prompt to /v1/completions", unless="")] = None
    raw: Annotated[Any, Unsupported("send a whole prompt to /v1/completions", unless=False)] = None
    preset: Annotated[Any, Unsupported("none are kept here; send the fields that it stands for", unless="")] = None
    safe_prompt: Annotated[Any, Unsupported("send a message of the role system", unless=False)] = None
    prompt_mode: Annotated[Any, Unsupported("use reasoning_effort or enable_thinking")] = None
    plugins: Annotated[Any, Unsupported(_SEARCH, unless=[])] = None
    search_parameters: Annotated[Any, Unsupported(_SEARCH, unless={})] = None
    enable_search: Annotated[Any, Unsupported(_SEARCH, unless=False)] = None
    images: Annotated[Any, Unsupported(_TEXT, unless=[])] = None
    image_data: Annotated[Any, Unsupported(_TEXT, unless=[])] = None
    media_io_kwargs: Annotated[Any, Unsupported(_TEXT, unless={})] = None
    mm_processor_kwargs: Annotated[Any, Unsupported(_TEXT, unless={})] = None

    # What an answer contains, and how it comes.
    return_hidden_states: Annotated[Any, Unsupported("use /v1/embeddings", unless=False)] = None
    top_n_tokens: Annotated[Any, Unsupported("use logprobs", unless=0)] = None
    n_probs: Annotated[Any, Unsupported("use logprobs", unless=0)] = None
    logprob_token_ids: Annotated[Any, Unsupported("use logprobs", unless=[])] = None
    return_full_text: Annotated[Any, Unsupported("use echo of /v1/completions", unless=False)] = None
    deferred: Annotated[Any, Unsupported("send the request to /v1/batches", unless=False)] = None
    kv_transfer_params: Annotated[Any, Unsupported("the router pairs workers itself; leave it out", unless={})] = None


class ForeignChatFields(Body):
    """Fields of chat endpoints."""

    system: Annotated[Any, Unsupported("send a message of the role system", unless="")] = None
    input_ids: Annotated[Any, Unsupported("send token ids to /v1/completions, as `prompt`", unless=[])] = None
    tool_prompt: Annotated[Any, Unsupported("the chat template writes it; leave it out", unless="")] = None
    continue_: Annotated[Any, Unsupported("use continue_final_message", unless=False)] = None
    think: Annotated[Any, Unsupported("use enable_thinking, or reasoning_effort")] = None
    reasoning_format: Annotated[Any, Unsupported(_APART, unless=("auto", "deepseek", "parsed"))] = None
    separate_reasoning: Annotated[Any, Unsupported(_APART, unless=True)] = None
    functions: Annotated[Any, Unsupported("use `tools`", unless=[])] = None
    function_call: Annotated[Any, Unsupported("use `tool_choice`", unless="none")] = None
    audio: Annotated[Any, Unsupported("models here write text", unless={})] = None
    modalities: Annotated[Any, Unsupported("models here write text", unless=["text"])] = None
    web_search_options: Annotated[Any, Unsupported(_SEARCH, unless={})] = None
    echo: Annotated[Any, Unsupported("use continue_final_message", unless=False)] = None
    best_of: Annotated[Any, Unsupported("use `n`", unless=1)] = None


class ForeignEmbeddingFields(Body):
    """Fields of embedding endpoints."""

    input_type: Annotated[Any, Unsupported("write what the model expects before each input into `input`")] = None
    task: Annotated[Any, Unsupported("write what the model expects before each input into `input`")] = None
    task_type: Annotated[Any, Unsupported("write what the model expects before each input into `input`")] = None
    prompt_name: Annotated[Any, Unsupported("write the prompt into `input`", unless="")] = None
    instruction: Annotated[Any, Unsupported("write the instruction into `input`", unless="")] = None
    messages: Annotated[Any, Unsupported("send `input`; /tokenize writes a chat as token ids")] = None
    truncate: Annotated[Any, Unsupported("use truncate_prompt_tokens", unless=(False, "NONE"))] = None
    truncation: Annotated[Any, Unsupported("use truncate_prompt_tokens", unless=False)] = None
    output_dimension: Annotated[Any, Unsupported("use dimensions")] = None
    output_dtype: Annotated[Any, Unsupported("vectors are of float32", unless="float")] = None
    embed_dtype: Annotated[Any, Unsupported("vectors are of float32", unless="float32")] = None
    embedding_type: Annotated[Any, Unsupported("use encoding_format", unless="float")] = None
    embedding_types: Annotated[Any, Unsupported("use encoding_format", unless=["float"])] = None
    endianness: Annotated[Any, Unsupported("numbers in base64 are little-endian", unless="little")] = None
    late_chunking: Annotated[Any, Unsupported("leave it out", unless=False)] = None
