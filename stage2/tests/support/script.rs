// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Short scripts that expand to traces.
//!
//! A script is a list of events in trace format, separated by `;`. An event without a CPU number
//! belongs to CPU 0. `0..16 * EVENT` repeats an event and replaces `#` by the number. An uppercase
//! word is a value or a list of events:
//!
//! | word | value or events |
//! |---|---|
//! | `ROOT` `T2` `T3` | tables: the root, one of level 2, one of level 3 |
//! | `ENTRYn` | entry n of `T3` |
//! | `LINK2` `LINK3` | descriptors of `T2` and `T3` |
//! | `PAGEn` `RPAGEn` `XPAGEn` `HINTEDn` | page n: writable, read-only, executable, contiguous |
//! | `BLOCK` `RBLOCK` `XBLOCK` `NTBLOCK` | the block of these pages: writable, read-only, executable, with nT |
//! | `PHYS` `IPAn` | the memory of the guest, 2M; the address of page n |
//! | `LINKED` `TWO_PAGES` `FLUSH` … | the events that [`EVENTS`] lists |

use granule_stage2::check::{Checker, Trace};

const VALUES: &[(&str, u64)] = &[
    ("ROOT", 0x8000_0000),
    ("T2", 0x8000_4000),
    ("T3", 0x8000_5000),
    ("LINK2", 0x8000_4003),
    ("LINK3", 0x8000_5003),
    ("BLOCK", 0x0040_0001_0000_07fd),
    ("RBLOCK", 0x0040_0001_0000_077d),
    ("XBLOCK", 0x0000_0001_0000_07fd),
    ("NTBLOCK", 0x0040_0001_0001_07fd),
    ("LOCKED", 0x400),
    ("PHYS", 0x1_0000_0000),
];

/// Values with a numeric suffix: name, value of suffix 0, step.
const INDEXED_VALUES: &[(&str, u64, u64)] = &[
    ("ENTRY", 0x8000_5000, 8),
    ("PAGE", 0x0040_0001_0000_07ff, 0x1000),
    ("RPAGE", 0x0040_0001_0000_077f, 0x1000),
    ("XPAGE", 0x0000_0001_0000_07ff, 0x1000),
    ("HINTED", 0x0050_0001_0000_07ff, 0x1000),
    ("IPA", 0, 0x1000),
];

/// Lists of events, which may contain other lists.
const EVENTS: &[(&str, &str)] = &[
    // Unlinked tables of levels 2 and 3; the lock is held.
    ("TABLES", "allocate T2; allocate T3; add-memory 0 PHYS 0x200000; lock exclusive"),
    ("LINK_T2", "store ROOT 0 LINK2 release; ref ROOT 1"),
    ("LINK_T3", "store T2 0 LINK3 release; ref T2 1"),
    ("LINKED", "TABLES; LINK_T2; LINK_T3"),
    ("TWO_PAGES", "store ENTRY0 0 PAGE0 release; store ENTRY1 0 PAGE1 release; ref T3 2; unlock"),
    ("ONE_BLOCK", "TABLES; LINK_T2; store T2 0 BLOCK release; ref T2 1; unlock"),
    ("UNMAP0", "store ENTRY0 PAGE0 0 plain; ref T3 -1"),
    ("UNMAP1", "store ENTRY1 PAGE1 0 plain; ref T3 -1"),
    ("BREAK_RUN", "0..16 * store ENTRY# HINTED# 0 plain"),
    ("UNLINK_T3", "store T2 LINK3 0 plain; ref T2 -1"),
    ("PROTECT0", "lock exclusive; store ENTRY0 PAGE0 RPAGE0 plain; FLUSH; unlock"),
    // CPUs 0 and 1 each make the entry that they have broken.
    (
        "MAKE_BOTH",
        "LEAVE; store ENTRY0 LOCKED RPAGE0 release; unlock; 1 LEAVE; \
         1 store ENTRY1 LOCKED RPAGE1 release; 1 unlock",
    ),
    ("COALESCE", "UNLINK_T3; FLUSH"),
    ("FREE_T3", "ref T2 1; ref T3 -1; free T3"),
    // Switch to the guest's VMID, and back.
    ("ENTER", "dsb ishst; vmid 1; isb"),
    ("LEAVE", "vmid 0; isb"),
    ("STAGE1", "dsb ish; tlbi vmalle1is; dsb ish"),
    ("FLUSH", "ENTER; tlbi vmalls12e1is; dsb ish; LEAVE"),
    (
        "FLUSH_LOCAL",
        "dsb nshst; vmid 1; isb; tlbi ipas2e1 0 ttl=3; dsb nsh; tlbi vmalle1; dsb nsh; LEAVE",
    ),
    ("CLEAN", "dc PHYS 0x200000; dsb ish"),
];

/// Returns the first line of a trace. `fields` replaces the defaults of `fwb`, `dic`, `tlbrange`,
/// `bbm`, `granule`, `ipa-bits`, `cpus` and the other fields.
pub fn first_line(fields: &str) -> String {
    // The parser takes the first occurrence of a field.
    format!(
        "granule-trace 1 {fields} granule=4096 ipa-bits=40 vmid=1 root=0x80000000 cpus=2 fwb=0 \
         dic=0 tlbrange=0 bbm=0\n"
    )
}

/// Checks a script. Its trace must survive conversion to text and back.
pub fn replay(features: &str, script: &str) -> Checker {
    let mut text = first_line(features);
    expand(script, "0", &mut text);
    let trace: Trace = text.parse().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(trace.to_string().parse(), Ok(trace.clone()));
    trace.replay()
}

fn expand(script: &str, cpu: &str, out: &mut String) {
    for event in script.split(';').map(str::trim).filter(|e| !e.is_empty()) {
        let (cpu, event) = match event.split_once(' ') {
            Some((number, rest)) if number.parse::<u8>().is_ok() => (number, rest),
            _ => (cpu, event),
        };
        if let Some((range, event)) = event.split_once(" * ") {
            let (from, to) = range.split_once("..").expect("a range");
            for n in from.parse::<u8>().unwrap()..to.parse().unwrap() {
                expand(&event.replace('#', &n.to_string()), cpu, out);
            }
            continue;
        }
        if let Some((_, events)) = EVENTS.iter().find(|(name, _)| *name == event) {
            expand(events, cpu, out);
            continue;
        }
        let words: Vec<_> = event.split_whitespace().map(value).collect();
        *out += &format!("{cpu} {}\n", words.join(" "));
    }
}

fn value(word: &str) -> String {
    let named = VALUES.iter().find(|(name, _)| *name == word);
    let numbered = INDEXED_VALUES.iter().find_map(|(name, first, step)| {
        let number: u64 = word.strip_prefix(name)?.parse().ok()?;
        Some(first + number * step)
    });
    let found = named.map(|(_, value)| *value).or(numbered);
    found.map_or(word.to_owned(), |value| format!("{value:#x}"))
}
