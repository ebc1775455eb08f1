// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Target of order files. A part has the offsets that its line names, and selects whole pages within
//! the regions.

use granule_vmm::{
    memory::on_demand::pages_of,
    vm::snapshot::order::{header, parse},
};

use crate::guest;

const MEMORY_CRC: u32 = 7;
const PAGE: u64 = 4096;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // Random bytes alone seldom pass the check of the first line.
    let with_header = header(MEMORY_CRC, text) + text;
    let memory = guest::zeroed_memory();
    let parsed = [text, &with_header].map(|text| parse(text, MEMORY_CRC));
    for part in parsed.into_iter().filter_map(Result::ok).flatten() {
        assert!(part.start <= part.end);
        assert!(part.start.is_multiple_of(PAGE) && part.end.is_multiple_of(PAGE));
        for (start, ram, pages) in pages_of(&memory, &part) {
            assert!(pages.start < pages.end && pages.end <= ram.size().0);
            assert!(pages.start.is_multiple_of(PAGE) && pages.end.is_multiple_of(PAGE));
            assert!(part.start < start + pages.end && start + pages.start < part.end);
        }
    }
}
