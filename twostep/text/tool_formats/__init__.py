"""How models write tool calls: a file for each kind of syntax, with what reads it and the grammar that holds an answer to it.

    events.py         what is found in an answer
    reader.py         an answer's characters as they come; what formats are read with
    values.py         arguments that are not JSON, by the types of a tool's schema
    format.py         a format, and what its grammar is made of
    json_calls.py     hermes, llama3_json, mistral, deepseek_v3, deepseek_v31
    tagged_calls.py   qwen3_coder, glm45
    pythonic.py       pythonic
    harmony_calls.py  openai (gpt-oss)

The table of them is TOOL_CALL_FORMATS in twostep/text/tool_calls.py.
"""
