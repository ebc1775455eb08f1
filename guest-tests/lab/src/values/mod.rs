// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values on the command line that select a kernel: version, revisions, build settings, page size.

mod build_setting;
mod linux_version;
mod page_size;
mod revisions;

pub use build_setting::{BuildSetting, MakeVariable, parse_variant};
pub use linux_version::LinuxVersion;
pub use page_size::PageSize;
pub use revisions::Revisions;

/// Values in the JSON of a plan are those of the command line.
macro_rules! serialize_as_on_the_command_line {
    ($($type:ty),*) => {$(
        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    )*};
}
pub(crate) use serialize_as_on_the_command_line;

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use serde::Serialize;

    use super::*;

    #[test]
    fn the_json_of_values_is_their_text_on_the_command_line() {
        fn round_trip<T>(text: &str) -> String
        where
            T: FromStr<Err = String> + Serialize + serde::de::DeserializeOwned,
        {
            let json = serde_json::to_value(text.parse::<T>().unwrap()).unwrap();
            let again: T = serde_json::from_value(json).unwrap();
            serde_json::to_value(again).unwrap().as_str().unwrap().to_owned()
        }

        let texts = [
            round_trip::<LinuxVersion>("5.10"),
            round_trip::<Revisions>("v6.1..topic"),
            round_trip::<Revisions>("v6.1"),
            round_trip::<MakeVariable>("KCFLAGS=-O1 -g"),
            round_trip::<BuildSetting>("CONFIG_SMP=n"),
            round_trip::<BuildSetting>("LLVM=1"),
        ];

        let expected = ["5.10", "v6.1..topic", "v6.1", "KCFLAGS=-O1 -g", "CONFIG_SMP=n", "LLVM=1"];
        assert_eq!(texts, expected);
        assert_eq!(serde_json::to_value(PageSize::Kib16).unwrap(), "16k");
    }
}
