// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Walks that the model of TLBs counted in each load of a boot.

use std::collections::BTreeMap;

use granule_report::render::group_digits;
use granule_types::{mark, units::Bytes};
use serde::Serialize;

use crate::{
    host::{page_cache_load::STEPS, tlb::TlbModel},
    jobs::counts::SegmentLine,
};

/// Accesses and walks of one load.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoadWalks {
    load: &'static str,
    accesses: u64,
    linear_accesses: u64,
    /// Walks of each copy of the model, in the order of the grains.
    walks: Vec<GrainWalks>,
}

/// Walks with one size of the linear map's leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct GrainWalks {
    grain: Bytes,
    walks: u64,
    /// Walks for addresses of the linear map.
    linear_walks: u64,
}

/// Returns the load whose segments have a mark; `None` for what is behind the last load.
fn load(mark: u8, is_boot: bool) -> Option<&'static str> {
    match mark {
        mark::PHASE_END => is_boot.then_some("boot"),
        mark::GUEST | mark::GUEST_INIT => Some("guest"),
        mark => STEPS.get(mark::step_number(mark)? as usize - 1).copied(),
    }
}

impl LoadWalks {
    /// Returns the figures of each load, in the order of execution.
    pub fn of_segments(segments: &[SegmentLine], model: &TlbModel) -> Vec<Self> {
        let mut is_boot = true;
        let mut loads: Vec<(&'static str, BTreeMap<&str, u64>)> = Vec::new();
        for segment in segments {
            is_boot &= segment.mark == mark::PHASE_END;
            let Some(load) = load(segment.mark, is_boot) else { continue };
            if loads.last().is_none_or(|(last, _)| *last != load) {
                loads.push((load, BTreeMap::new()));
            }
            let Some((_, counts)) = loads.last_mut() else { continue };
            for (name, count) in &segment.counts {
                *counts.entry(name).or_default() += count;
            }
        }
        loads.into_iter().map(|(load, counts)| Self::new(load, &counts, model)).collect()
    }

    fn new(load: &'static str, counts: &BTreeMap<&str, u64>, model: &TlbModel) -> Self {
        let count = |name: &str| counts.get(name).copied().unwrap_or(0);
        let walks = model.grains.iter().map(|&grain| {
            let name = format!("walks {}K", grain.0 >> 10);
            let linear_walks = count(&format!("linear {name}"));
            GrainWalks { grain, walks: count(&name), linear_walks }
        });
        Self {
            load,
            accesses: count("accesses"),
            linear_accesses: count("linear accesses"),
            walks: walks.collect(),
        }
    }

    /// Returns the headings of the cells.
    pub fn headings(model: &TlbModel) -> Vec<String> {
        let fixed = ["load", "accesses", "linear"].map(str::to_owned);
        let grains = model.grains.iter();
        let walks = grains.flat_map(|grain| [format!("walks {grain}"), format!("linear {grain}")]);
        fixed.into_iter().chain(walks).collect()
    }

    pub fn cells(&self) -> Vec<String> {
        let walks = self.walks.iter().flat_map(|walks| [walks.walks, walks.linear_walks]);
        let counts = [self.accesses, self.linear_accesses].into_iter().chain(walks);
        let counts = counts.map(|count| group_digits(&count.to_string()));
        [self.load.to_owned()].into_iter().chain(counts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_has_the_counts_of_its_segments() {
        let segment = |mark: u8, span: bool, walks: u64| SegmentLine {
            mark,
            span: span.then(|| "paging_init".to_owned()),
            counts: [("accesses", 100), ("walks 4K", walks), ("linear walks 4K", walks / 2)]
                .map(|(name, count)| (name.to_owned(), count))
                .into(),
            ..SegmentLine::default()
        };
        let model = TlbModel { sizes: "1:1x1".parse().unwrap(), grains: vec![Bytes::kib(4)] };
        let marks = [
            (0x60, true, 2),
            (0x60, false, 4),
            (0x78, false, 8),
            (0x7b, false, 16),
            (0x60, false, 32),
        ];
        let segments = marks.map(|(mark, span, walks)| segment(mark, span, walks));

        let loads = LoadWalks::of_segments(&segments, &model);

        let cells: Vec<_> = loads.iter().map(|load| load.cells().join(" ")).collect();
        assert_eq!(cells, ["boot 200 0 6 3", "write 100 0 8 4", "metadata 100 0 16 8"]);
        assert_eq!(LoadWalks::headings(&model).len(), 5);
    }

    #[test]
    fn a_guest_is_one_load_with_its_init() {
        let segment = |mark| SegmentLine { mark, ..SegmentLine::default() };
        let model = TlbModel { sizes: "1:1x1".parse().unwrap(), grains: Vec::new() };

        let loads = LoadWalks::of_segments(&[0x60, 0x71, 0x72, 0x60].map(segment), &model);

        let names: Vec<_> = loads.iter().map(|load| load.load).collect();
        assert_eq!(names, ["boot", "guest"]);
    }
}
