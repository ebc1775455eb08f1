// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State of a VM, without the contents of its memory.
//!
//! The text has two lines of JSON: a header with format, size and checksum of the second line, which
//! is the [`VmState`]. A change of the state's meaning takes another number of the format, and other
//! numbers are refused.

use std::collections::BTreeMap;

use flate2::Crc;
use granule_types::units::Bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::super::config::VmConfig;
use crate::{arch::MachineState, devices::DeviceState};

/// Format of the state.
const FORMAT: &str = "granule.snapshot/2";

/// State of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmState {
    /// Base page size of the host.
    pub page_size: Bytes,
    /// Frequency of the counter in hertz, by which the guest measures time.
    pub counter_frequency: u64,
    /// Width of guest-physical addresses.
    pub ipa_bits: u8,
    /// Configuration of the VM; its kernel has been loaded.
    pub config: VmConfig,
    /// Memory zones, in the order of the configuration and of the memory file.
    pub zones: Vec<ZoneState>,
    /// Name of the memory file.
    pub memory: String,
    /// Bytes of the pages that are not zero.
    pub data_bytes: Bytes,
    /// Checksum of these pages, as [`image`](crate::memory::image) defines it.
    pub memory_crc: u32,
    /// Files of changes to the memory file, the oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<ChangesState>,
    /// States of the devices, by name.
    pub devices: BTreeMap<String, DeviceState>,
    /// vCPUs and interrupt controller.
    pub machine: MachineState,
}

/// A zone of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneState {
    /// First guest address.
    pub start: u64,
    /// Size.
    pub size: Bytes,
}

/// A file of changes to the memory file, as [`changes`](crate::memory::changes) defines it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangesState {
    /// Name of the file.
    pub name: String,
    /// Length of the file.
    pub bytes: Bytes,
    /// CRC-32 of the file.
    pub crc: u32,
}

/// Error returned when a text is not a state.
#[derive(Debug, Error)]
pub enum StateError {
    /// Error returned when the first line is not a header.
    #[error("the first line is not the header of a snapshot: {0}")]
    Header(serde_json::Error),
    /// Error returned for another format.
    #[error("the format is '{0}', and this program reads {FORMAT}: use the version that wrote it")]
    Format(String),
    /// Error returned when the text is not what was written.
    #[error("the state is truncated or damaged: it has {length} bytes with the checksum {crc:08x}")]
    Damaged {
        /// Length of the second line.
        length: usize,
        /// Checksum of this line.
        crc: u32,
    },
    /// Error returned when the state lacks a field, or has an unknown or invalid one.
    #[error("the state is invalid: {0}")]
    Invalid(serde_json::Error),
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    bytes: usize,
    crc32: String,
}

impl VmState {
    /// Returns the names of its files of memory and changes.
    #[must_use]
    pub fn files(&self) -> Vec<String> {
        let changes = self.changes.iter().map(|changes| &changes.name);
        std::iter::once(&self.memory).chain(changes).cloned().collect()
    }

    /// Returns a checksum that identifies the contents of memory.
    #[must_use]
    pub fn contents_crc(&self) -> u32 {
        if self.changes.is_empty() {
            return self.memory_crc;
        }
        let mut crc = Crc::new();
        crc.update(&self.memory_crc.to_le_bytes());
        for changes in &self.changes {
            crc.update(&changes.bytes.0.to_le_bytes());
            crc.update(&changes.crc.to_le_bytes());
        }
        crc.sum()
    }

    /// Returns the text of the state.
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        let state = serde_json::to_string(self)?;
        let header = Header {
            format: FORMAT.to_owned(),
            bytes: state.len(),
            crc32: format!("{:08x}", checksum(&state)),
        };
        Ok(format!("{}\n{state}\n", serde_json::to_string(&header)?))
    }

    /// Parses the text of a state.
    ///
    /// # Errors
    /// The text is not that of a state.
    pub fn parse(text: &str) -> Result<Self, StateError> {
        let (header, state) = text.split_once('\n').unwrap_or((text, ""));
        let header: Header = serde_json::from_str(header).map_err(StateError::Header)?;
        if header.format != FORMAT {
            return Err(StateError::Format(header.format));
        }
        let state = state.strip_suffix('\n').unwrap_or(state);
        let crc = checksum(state);
        if state.len() != header.bytes || header.crc32 != format!("{crc:08x}") {
            return Err(StateError::Damaged { length: state.len(), crc });
        }
        serde_json::from_str(state).map_err(StateError::Invalid)
    }
}

/// Returns the checksum of a text.
pub(super) fn checksum(text: &str) -> u32 {
    let mut crc = Crc::new();
    crc.update(text.as_bytes());
    crc.sum()
}

#[cfg(test)]
pub mod testing {
    use super::*;
    use crate::arch::aarch64::state::GicState;

    /// Returns the state of a VM without vCPUs, devices and memory.
    pub fn small_state(memory: String) -> VmState {
        let gic = GicState {
            interrupts: 0,
            iidr: Default::default(),
            distributor: BTreeMap::default(),
            levels: Default::default(),
            vcpus: Vec::new(),
            its: None,
        };
        VmState {
            page_size: Bytes(4096),
            counter_frequency: 1_000_000_000,
            ipa_bits: 32,
            config: VmConfig::default(),
            zones: Vec::new(),
            memory,
            data_bytes: Bytes(0),
            memory_crc: 0,
            changes: Vec::new(),
            devices: BTreeMap::new(),
            machine: MachineState { vcpus: Vec::new(), gic },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{testing::small_state, *};

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let state = small_state("memory-3".to_owned());

        let text = state.to_text().unwrap();

        assert_eq!(VmState::parse(&text).unwrap(), state);
        assert_eq!(text.lines().count(), 2);
    }

    #[test]
    fn the_checksum_of_contents_depends_on_the_list_of_changes() {
        let mut state = small_state("memory-3".to_owned());
        state.memory_crc = 7;
        let text = state.to_text().unwrap();
        let changes =
            |crc| ChangesState { name: format!("changes-{crc}"), bytes: Bytes(4112), crc };
        let crc_of = |changes| VmState { changes, ..state.clone() }.contents_crc();

        let lists = [vec![], vec![changes(1)], vec![changes(1), changes(2)], vec![changes(2)]];
        let checksums = lists.map(crc_of);

        assert_eq!(checksums[0], 7);
        let different: std::collections::BTreeSet<_> = checksums.into_iter().collect();
        assert_eq!(different.len(), 4);
        assert!(!text.contains("changes"), "{text}");
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_recognised(at in 0_usize..400, value in any::<u8>()) {
            let text = small_state("memory-3".to_owned()).to_text().unwrap();
            let at = at % text.len();
            let mut changed = text.clone().into_bytes();
            changed[at] = value;

            if let Ok(changed) = String::from_utf8(changed)
                && changed.trim_end() != text.trim_end()
            {
                prop_assert!(VmState::parse(&changed).is_err());
            }
        }

        #[test]
        fn parse_never_panics(text in "\\PC{0,300}") {
            let _ = VmState::parse(&text);
        }
    }
}
