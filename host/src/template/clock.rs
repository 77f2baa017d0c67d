//! `strftime_now`: the date that some templates print.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time that a render sees. It is an input, so that a render can be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WallClock {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub unix_seconds: i64,
    /// What local time is ahead of UTC, in seconds.
    pub utc_offset_seconds: i32,
}

const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A date and time of day in the proleptic Gregorian calendar.
struct Civil {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl WallClock {
    /// The system's time, in UTC: a prompt must not depend on the time zone of the machine that serves it.
    pub fn now() -> Self {
        let unix_seconds = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            Err(before) => -i64::try_from(before.duration().as_secs()).unwrap_or(i64::MAX),
        };
        WallClock {
            unix_seconds,
            utc_offset_seconds: 0,
        }
    }

    /// Formats as C's `strftime` in the C locale, including glibc's `-`, `_` and `0` flags. An unknown directive is
    /// copied, as Python does on Linux.
    pub fn strftime(&self, format: &str) -> String {
        let civil = self.civil();
        let mut out = String::with_capacity(format.len() + 16);
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let mut ahead = rest.clone();
            let mut flag = None;
            let mut directive = ahead.next();
            if let Some(sign @ ('-' | '_' | '0')) = directive {
                flag = Some(sign);
                directive = ahead.next();
            }
            match directive.and_then(|directive| self.directive(&civil, directive, flag)) {
                Some(text) => {
                    out.push_str(&text);
                    rest = ahead;
                }
                None => out.push('%'),
            }
        }
        out
    }

    fn directive(&self, t: &Civil, directive: char, flag: Option<char>) -> Option<String> {
        let number = |value: i64, width: usize, fill: char| match (flag, fill) {
            (Some('-'), _) => value.to_string(),
            (Some('_'), _) | (None, ' ') => format!("{value:>width$}"),
            _ => format!("{value:0>width$}"),
        };
        let hour12 = if t.hour % 12 == 0 { 12 } else { t.hour % 12 };
        let pick = |names: &[&str], index: i64| {
            usize::try_from(index)
                .ok()
                .and_then(|index| names.get(index).map(|name| (*name).to_owned()))
        };
        let short = |name: String| name.chars().take(3).collect::<String>();
        Some(match directive {
            '%' => "%".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            'Y' => t.year.to_string(),
            'C' => number(t.year.div_euclid(100), 2, '0'),
            'y' => number(t.year.rem_euclid(100), 2, '0'),
            'm' => number(t.month, 2, '0'),
            'd' => number(t.day, 2, '0'),
            'e' => number(t.day, 2, ' '),
            'j' => number(t.day_of_year, 3, '0'),
            'H' => number(t.hour, 2, '0'),
            'k' => number(t.hour, 2, ' '),
            'I' => number(hour12, 2, '0'),
            'l' => number(hour12, 2, ' '),
            'M' => number(t.minute, 2, '0'),
            'S' => number(t.second, 2, '0'),
            'f' => "000000".to_owned(),
            'p' => if t.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'P' => if t.hour < 12 { "am" } else { "pm" }.to_owned(),
            'A' => pick(&WEEKDAYS, t.weekday)?,
            'a' => short(pick(&WEEKDAYS, t.weekday)?),
            'B' => pick(&MONTHS, t.month - 1)?,
            'b' | 'h' => short(pick(&MONTHS, t.month - 1)?),
            'u' => (if t.weekday == 0 { 7 } else { t.weekday }).to_string(),
            'w' => t.weekday.to_string(),
            // C99 7.23.3.5: weeks from the first Sunday and from the first Monday.
            'U' => number((t.day_of_year + 6 - t.weekday) / 7, 2, '0'),
            'W' => number((t.day_of_year + 6 - (t.weekday + 6) % 7) / 7, 2, '0'),
            's' => self.unix_seconds.to_string(),
            // Python's `datetime.now()` carries no zone, so both are empty.
            'z' | 'Z' => String::new(),
            'F' => self.strftime("%Y-%m-%d"),
            'T' | 'X' => self.strftime("%H:%M:%S"),
            'D' | 'x' => self.strftime("%m/%d/%y"),
            'R' => self.strftime("%H:%M"),
            'r' => self.strftime("%I:%M:%S %p"),
            'c' => self.strftime("%a %b %e %H:%M:%S %Y"),
            _ => return None,
        })
    }

    /// Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
    fn civil(&self) -> Civil {
        let local = self
            .unix_seconds
            .saturating_add(i64::from(self.utc_offset_seconds));
        let (days, of_day) = (local.div_euclid(86_400), local.rem_euclid(86_400));
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let from_march = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let day = from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        // March 1st is day 60 of a common year; the months before it end the count from March.
        let day_of_year = if month > 2 {
            from_march + 60 + i64::from(leap)
        } else {
            from_march - 305
        };
        Civil {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4).rem_euclid(7),
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix_seconds: i64) -> WallClock {
        WallClock {
            unix_seconds,
            utc_offset_seconds: 0,
        }
    }

    #[test]
    fn formats_that_templates_use() {
        let clock = at(1_709_210_103); // 2024-02-29 12:35:03 UTC, a Thursday
        for (format, expected) in [
            ("%Y-%m-%d", "2024-02-29"),
            ("%d %b %Y", "29 Feb 2024"),
            ("%B %d, %Y", "February 29, 2024"),
            ("%A, %-d %B %y", "Thursday, 29 February 24"),
            (
                "%H:%M:%S %I %p %j %U %W %u %w",
                "12:35:03 12 PM 060 08 09 4 4",
            ),
            (
                "%e|%_m|%-m|%F %T|%D|%%|%Q|100%",
                "29| 2|2|2024-02-29 12:35:03|02/29/24|%|%Q|100%",
            ),
        ] {
            assert_eq!(clock.strftime(format), expected, "{format}");
        }
    }

    #[test]
    fn dates_around_the_edges() {
        let date = |seconds: i64| at(seconds).strftime("%F %j %a");
        assert_eq!(date(0), "1970-01-01 001 Thu");
        assert_eq!(date(-1), "1969-12-31 365 Wed");
        assert_eq!(date(951_782_400), "2000-02-29 060 Tue");
        assert_eq!(date(951_868_800), "2000-03-01 061 Wed");
        assert_eq!(date(4_107_542_400), "2100-03-01 060 Mon");
        assert_eq!(date(1_735_603_200), "2024-12-31 366 Tue");
        let ahead = WallClock {
            unix_seconds: 82_800,
            utc_offset_seconds: 7_200,
        };
        assert_eq!(ahead.strftime("%d %H"), "02 01");
    }
}
