"""How fast Strongroom is, measured beside what one would use otherwise.

One module a family of figures; `families` lists them, `measure` interleaves what is compared,
`figure` is what a family reports. Run as ``python -m strongroom_bench``, or with tox as
``tox run -e bench``; the tests run the same code with small sizes and judge no time.
"""
