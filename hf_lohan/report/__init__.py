"""What a run wrote about itself, read back and shown: one HTML page for somebody who was not there.

`files` names what is written (`integrations` writes it), `run_data` reads it, `findings` computes what it says,
`sentences` says it, `charts` and `step_picture` draw it, and `page` puts it on a page.
"""

__all__: list[str] = []
