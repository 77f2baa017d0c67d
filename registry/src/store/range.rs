//! Partial content: whether an answer continues the bytes that are already here.

use super::http::Reply;

/// What is wrong with a 206, if anything. A server may ignore `If-Range`, so the tag is compared as well.
pub(super) fn continuation_fault(
    reply: &Reply,
    offset: u64,
    size: Option<u64>,
    etag: Option<&str>,
) -> Option<&'static str> {
    let range = reply.header("content-range").and_then(parse_content_range);
    let Some((start, total)) = range else {
        return Some("the server does not say which range it sends");
    };
    if start != offset {
        return Some("the server sends another range than was asked");
    }
    if total.is_some() && total != size {
        return Some("the size on the server changed");
    }
    match (etag, reply.header("etag")) {
        (Some(before), Some(now)) if before != now => Some("the content on the server changed"),
        _ => None,
    }
}

/// Start and total of `bytes 100-199/200`; the total may be `*`.
fn parse_content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    let total = match total.trim() {
        "*" => None,
        number => Some(number.parse().ok()?),
    };
    Some((start.trim().parse().ok()?, total))
}

/// RFC 9110 section 13.1.5: `If-Range` may not carry a weak tag.
pub(super) fn is_strong(tag: &str) -> bool {
    tag.len() > 2 && tag.starts_with('"') && tag.ends_with('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        assert_eq!(parse_content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_content_range("bytes 5-9/*"), Some((5, None)));
        for bad in [
            "",
            "bytes",
            "bytes */10",
            "bytes 5/10",
            "items 5-9/10",
            "bytes -5-9/x",
        ] {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn weak_tags_are_not_sent() {
        assert!(is_strong("\"abc\""));
        assert!(!is_strong("W/\"abc\""));
        assert!(!is_strong("\"\""));
        assert!(!is_strong("abc"));
    }
}
