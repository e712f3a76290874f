"""The reading of racecheck's reports; needs no GPU. The excerpt is from a run on an H200."""

from racecheck import function_of, sort_reports

EXCERPT = """\
========= Error: Race reported between Write access at mkc::bulk_copy(unsigned int, const void *, \
int, unsigned int, unsigned long long)+0x81c0 in kernel.cu:146
=========     and Read access at mkc::load_fragment(const uint4 *)+0xd5d0 in kernel.cu:152 \
[232128 hazards]
=========     and Write access at mkc::write_key(unsigned char *, int, int, int, uint4)+0x12210 in \
kernel.cu:1290 [32 hazards]
=========
========= Error: Race reported between Write access at void mkc::add_products<mkc::Consumer<(int)1\
, (int)12>>(T1 &, const mkc::Entry &)+0xdc40 in kernel.cu:1606
=========     and Read access at mkc::Consumer<(int)1, (int)12>::collect(bool)+0xe110 in \
kernel.cu:1179 [15392 hazards]
=========
========= Error: Race reported between Write access at mkc::store_release(int *, int)+0x4260 in \
kernel.cu:174
=========     and Read access at decode_step_1+0x7580 [540 hazards]
"""


def test_functions_lose_scope_templates_and_parameters() -> None:
    assert function_of("mkc::Consumer<(int)1, (int)12>::collect(bool)") == "collect"
    assert function_of("void mkc::list_active<(int)1>(mkc::Routing<T1> &, int)") == "list_active"
    assert function_of("decode_step_1") == "decode_step"


def test_explained_pairs_are_counted() -> None:
    known, unknown = sort_reports(EXCERPT)
    assert known == {"ring": 232160, "deposits": 15392, "words": 540}
    assert not unknown


def test_any_other_pair_is_a_finding() -> None:
    strange = EXCERPT.replace("mkc::load_fragment(const uint4 *)", "mkc::finish_head(int)")
    _, unknown = sort_reports(strange)
    assert unknown == {("bulk_copy", "finish_head"): 232128}


def test_every_report_of_the_first_kind_is_read() -> None:
    assert sort_reports("nothing of the kind") == ({}, {})
