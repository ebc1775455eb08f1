// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics that `granule run --stats` wrote of a guest's boot, and checks of its stalls in faults against
//! other counts of the same faults.

use std::collections::BTreeMap;

use granule_types::units::Bytes;
use serde::Deserialize;

/// Statistics of `granule run --stats`; fields that the report does not use are ignored.
#[derive(Debug, Deserialize)]
pub struct BootStatistics {
    #[serde(rename = "ended")]
    pub outcome: String,
    #[serde(default)]
    pub marks: Vec<(u8, u64)>,
    pub phases: Vec<BootPhaseStatistics>,
}

#[derive(Debug, Deserialize)]
pub struct BootPhaseStatistics {
    pub name: String,
    pub ns: u64,
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
    #[serde(default)]
    stalls: BTreeMap<String, u64>,
    #[serde(default, rename = "resident")]
    pub resident_bytes: Vec<BTreeMap<u64, u64>>,
    pub stage2_tables: Option<u64>,
    pub overhead: Option<u64>,
}

impl BootStatistics {
    /// Returns the number (`.count`) or the time (`.ns`) of stalls in faults, by the type and level of the
    /// fault; empty if no stalls were measured.
    fn fault_stalls(&self, suffix: &str) -> BTreeMap<&str, u64> {
        // Names of other stalls have no level.
        self.sum_stalls(|name| name.strip_suffix(suffix).filter(|name| name.contains('.')))
    }

    /// Returns the sums of all phases, by the part of their names that `select` returns.
    fn sum_stalls<'a>(
        &'a self,
        select: impl Fn(&'a str) -> Option<&'a str>,
    ) -> BTreeMap<&'a str, u64> {
        let mut sums = BTreeMap::new();
        for (name, count) in self.phases.iter().flat_map(|phase| &phase.stalls) {
            if let Some(name) = select(name) {
                *sums.entry(name).or_default() += count;
            }
        }
        sums
    }

    /// Checks that each fault that the host's kernel counted has a stall, if stalls were measured.
    pub fn check_stalls(&self) -> Result<(), String> {
        for (name, stalls) in self.fault_stalls(".count") {
            let faults: u64 = self.phases.iter().filter_map(|phase| phase.faults.get(name)).sum();
            if faults != stalls {
                return Err(format!("measured {stalls} stalls of {faults} faults {name}"));
            }
        }
        Ok(())
    }

    /// Checks that the plugin counted as many faults as there are stalls, if it counted any, and that their
    /// instructions and the time of the stalls differ by at most a percent.
    pub fn check_stall_times(&self, faults: u64, instructions: u64) -> Result<(), String> {
        let sum = |suffix| self.fault_stalls(suffix).values().sum::<u64>();
        let (stalls, nanoseconds) = (sum(".count"), sum(".ns"));
        if faults > 0 && faults != stalls {
            return Err(format!("measured {stalls} stalls of {faults} faults"));
        }
        if faults > 0 && nanoseconds.abs_diff(instructions) * 100 > instructions {
            let text = format!("measured {nanoseconds} ns of stalls that last {instructions} ns");
            return Err(text);
        }
        Ok(())
    }

    /// Returns the number of stalls by the size that the kernel mapped, if sizes were measured.
    fn mapped_stalls<'a>(&'a self) -> Option<BTreeMap<&'a str, u64>> {
        // A size has a row from its first mapping, and the lost ones have one from the start.
        let is_measured = self.phases.iter().any(|phase| phase.stalls.contains_key("lost-sizes"));
        let size = |name: &'a str| name.strip_prefix("mapped-")?.strip_suffix(".count");
        is_measured.then(|| self.sum_stalls(size))
    }

    /// Checks that each mapping, which the plugin counted, has a stall with one of these sizes, if sizes were
    /// measured. The last fault of a vCPU may have none.
    pub fn check_maps(&self, maps: u64, vcpus: u32, sizes: &[Bytes]) -> Result<(), String> {
        let Some(measured) = self.mapped_stalls() else { return Ok(()) };
        let stalls: u64 = measured.values().sum();
        if stalls > maps || stalls + u64::from(vcpus) < maps {
            return Err(format!("measured the sizes of {stalls} of {maps} mappings"));
        }
        let is_size = |text: &str| text.parse().is_ok_and(|size| sizes.contains(&size));
        match measured.into_keys().find(|text| !is_size(text)) {
            Some(text) => Err(format!("measured mappings of {text}, which this guest has not")),
            None => Ok(()),
        }
    }

    /// Checks that each lookup of the host's page, which the plugin counted, has a stall, if stalls were
    /// measured. The last fault of a vCPU may have none, and one of the access flag has no lookup.
    pub fn check_lookups(&self, lookups: Option<u64>, vcpus: u32) -> Result<(), String> {
        let stalls = self.fault_stalls(".count");
        let with_lookup = stalls.iter().filter(|(name, _)| !name.starts_with("access-flag"));
        let sum: u64 = with_lookup.map(|(_, count)| count).sum();
        match lookups {
            Some(lookups) if !stalls.is_empty() && sum + u64::from(vcpus) < lookups => {
                Err(format!("measured {sum} stalls of {lookups} lookups of a page"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counted_fault_needs_a_stall_if_stalls_are_measured() {
        let read = |stalls: &str| {
            let text = format!(
                r#"{{"ended":"off","phases":[{{"name":"boot","ns":1,"faults":{{"permission.level3":5}},
                "stalls":{{"mmio.count":9{stalls}}}}},{{"name":"run","ns":1,"faults":{{
                "permission.level3":2}},"stalls":{{"mmio.count":9{stalls}}}}}]}}"#
            );
            serde_json::from_str::<BootStatistics>(&text).unwrap().check_stalls()
        };

        assert_eq!(read(""), Ok(()));
        assert_eq!(read(r#","lock-wait.count":3"#), Ok(()));
        let error = read(r#","permission.level3.count":3"#).unwrap_err();
        assert_eq!(error, "measured 6 stalls of 7 faults permission.level3");
    }

    #[test]
    fn each_lookup_of_a_page_needs_a_stall_if_stalls_are_measured() {
        let check = |stalls: &str, lookups| {
            let phase = |name: &str| {
                format!(
                    r#"{{"name":"{name}","ns":1,"stalls":{{"mmio.count":9,"lost":0{stalls}}}}}"#
                )
            };
            let text =
                format!(r#"{{"ended":"off","phases":[{},{}]}}"#, phase("boot"), phase("run"));
            serde_json::from_str::<BootStatistics>(&text).unwrap().check_lookups(lookups, 2)
        };
        let stalls = r#","access-flag.level3.count":9,"permission.level3.count":3,
            "translation.level3.count":4"#;

        assert_eq!(check("", Some(5)), Ok(()));
        assert_eq!(check(stalls, None), Ok(()));
        assert_eq!(check(stalls, Some(14)), Ok(()));
        assert_eq!(check(stalls, Some(16)), Ok(()), "the last fault of each vCPU");
        let error = check(stalls, Some(17)).unwrap_err();
        assert_eq!(error, "measured 14 stalls of 17 lookups of a page");
    }

    #[test]
    fn each_mapping_needs_a_size_that_the_guest_can_have_if_sizes_are_measured() {
        let check = |stalls: &str, maps, sizes: &[Bytes]| {
            let text = format!(
                r#"{{"ended":"off","phases":[{{"name":"boot","ns":1,"stalls":{{"mmio.count":9{stalls}}}}}]}}"#
            );
            serde_json::from_str::<BootStatistics>(&text).unwrap().check_maps(maps, 1, sizes)
        };
        let stalls = r#","lost-sizes":0,"mapped-2M.count":1,"mapped-4K.count":4,"mapped-4K.ns":70"#;
        let sizes = [Bytes::kib(4), Bytes::mib(2)];

        assert_eq!(check("", 9, &sizes), Ok(()), "not measured");
        assert_eq!(check(stalls, 5, &sizes), Ok(()));
        assert_eq!(check(stalls, 6, &sizes), Ok(()), "the last fault of the vCPU");
        for maps in [4, 7] {
            let error = check(stalls, maps, &sizes).unwrap_err();
            assert_eq!(error, format!("measured the sizes of 5 of {maps} mappings"));
        }
        let error = check(r#","lost-sizes":0"#, 9, &sizes).unwrap_err();
        assert_eq!(error, "measured the sizes of 0 of 9 mappings");
        let error = check(stalls, 5, &sizes[..1]).unwrap_err();
        assert_eq!(error, "measured mappings of 2M, which this guest has not");
    }

    #[test]
    fn stalls_have_the_number_and_time_of_the_counted_faults() {
        let text = r#"{"ended":"off","phases":[{"name":"boot","ns":1,"stalls":{"mmio.count":9,
            "mmio.ns":800,"lock-wait.count":1,"lock-wait.ns":90,"permission.level3.count":2,
            "permission.level3.ns":400,"translation.level3.count":1,"translation.level3.ns":600}}]}"#;
        let statistics: BootStatistics = serde_json::from_str(text).unwrap();
        let check = |faults, instructions| statistics.check_stall_times(faults, instructions);

        assert_eq!(check(0, 0), Ok(()), "not counted");
        assert_eq!(check(3, 1010), Ok(()));
        assert_eq!(check(3, 991), Ok(()));
        assert_eq!(check(4, 1000).unwrap_err(), "measured 3 stalls of 4 faults");
        let error = "measured 1000 ns of stalls that last 1020 ns";
        assert_eq!(check(3, 1020).unwrap_err(), error);
    }
}
