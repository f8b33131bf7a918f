from __future__ import annotations

import itertools

from tests.benchmarks.test_rotations import count_words, passage


def test_collections_have_the_places_of_the_rotations() -> None:
    from pipelines import make_collections
    from rotations import Geometry, build_rotations

    geometry = Geometry(n_places=3, least=5, most=20, low=15, high=60)
    data = build_rotations([passage(i) for i in range(7)], geometry, count_words)
    collections = make_collections(data)
    assert [len(collection.documents) for collection in collections] == [2, 2, 2]
    queries = list(itertools.chain.from_iterable(collection.queries for collection in collections))
    assert len({query.qid for query in queries}) == len(queries) == 18
    texts = {d["docno"]: d["text"] for collection in collections for d in collection.documents}
    for query in queries:
        assert f"passage p{query.question[1:]}." in texts[query.docno].split("\n\n")[query.index]
        assert query.place == ("beginning", "middle", "end")[query.index]
