// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists of host CPUs, as the kernel and command lines write them.

use std::{fmt, str::FromStr};

use thiserror::Error;

/// Host CPUs in the order of the text, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// A text that is no list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is not a list of CPUs; expected numbers and ranges, such as 0-3,8")]
pub struct ParseCpuListError(String);

impl CpuList {
    /// Returns the CPUs in their order.
    #[must_use]
    pub fn cpus(&self) -> &[usize] {
        &self.0
    }

    /// Assigns a CPU to each vCPU, round-robin.
    #[must_use]
    pub fn for_vcpus(&self, vcpus: u32) -> Vec<usize> {
        self.0.iter().copied().cycle().zip(0..vcpus).map(|(cpu, _)| cpu).collect()
    }
}

impl FromStr for CpuList {
    type Err = ParseCpuListError;

    /// Reads numbers and ranges, such as `0-3,8`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseCpuListError(text.to_owned());
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u16>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            cpus.extend((first..=last).map(usize::from));
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<_> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&cpus.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_numbers_and_ranges_in_their_order() {
        for (text, cpus) in [("0-3,8\n", vec![0, 1, 2, 3, 8]), ("7,0-1", vec![7, 0, 1])] {
            assert_eq!(text.parse().map(|list: CpuList| list.cpus().to_vec()), Ok(cpus), "{text}");
        }
        for malformed in ["", ",", "3-1", "0-99999", "a"] {
            let error = malformed.parse::<CpuList>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("'{malformed}' is not")), "{error}");
        }
    }

    #[test]
    fn vcpus_share_the_cpus_of_a_short_list() {
        let list: CpuList = "4,2".parse().unwrap();

        assert_eq!(list.for_vcpus(3), [4, 2, 4]);
        assert_eq!(list.to_string(), "4,2");
    }
}
