package gateway

import (
	"encoding/json"
	"slices"
)

// The functions here walk JSON that is known to be well-formed, without decoding it: a request's body after openai.Parse,
// or an event of an answer. On anything else they stop early and find nothing; they never read beyond the text.

// jsonSpan is a stretch of a text.
type jsonSpan struct{ start, end int }

// of returns the bytes of the stretch.
func (s jsonSpan) of(b []byte) []byte { return b[s.start:s.end] }

// jsonMember returns where the value of an object's member stands; of a doubled key the last counts, as for the engine. b
// may begin with white space or a byte order mark.
func jsonMember(b []byte, name string) (jsonSpan, bool) {
	var found jsonSpan
	ok := false
	jsonObject(b, func(key []byte, value jsonSpan) bool {
		if jsonKeyIs(key, name) {
			found, ok = value, true
		}
		return true
	})
	return found, ok
}

// jsonObject calls visit for each member of the object that b holds, until it returns false. key is a string with its
// quotes, as it stands.
func jsonObject(b []byte, visit func(key []byte, value jsonSpan) bool) {
	i := 0
	if len(b) >= 3 && string(b[:3]) == "\xef\xbb\xbf" {
		i = 3
	}
	i = jsonSpace(b, i)
	if i >= len(b) || b[i] != '{' {
		return
	}
	i = jsonSpace(b, i+1)
	for i < len(b) && b[i] == '"' {
		end := jsonString(b, i)
		key := b[i:end]
		i = jsonSpace(b, end)
		if i >= len(b) || b[i] != ':' {
			return
		}
		start := jsonSpace(b, i+1)
		end = jsonValue(b, start)
		if end <= start || !visit(key, jsonSpan{start, end}) {
			return
		}
		i = jsonSpace(b, end)
		if i >= len(b) || b[i] != ',' {
			return
		}
		i = jsonSpace(b, i+1)
	}
}

// jsonArray calls visit for each element of the array that b holds, until it returns false.
func jsonArray(b []byte, visit func(value jsonSpan) bool) {
	i := jsonSpace(b, 0)
	if i >= len(b) || b[i] != '[' {
		return
	}
	i = jsonSpace(b, i+1)
	for i < len(b) && b[i] != ']' {
		end := jsonValue(b, i)
		if end <= i || !visit(jsonSpan{i, end}) {
			return
		}
		i = jsonSpace(b, end)
		if i >= len(b) || b[i] != ',' {
			return
		}
		i = jsonSpace(b, i+1)
	}
}

// jsonKeyIs says whether a key with its quotes is name, escapes resolved.
func jsonKeyIs(key []byte, name string) bool {
	if len(key) == len(name)+2 && string(key[1:len(key)-1]) == name {
		return true
	}
	if !slices.Contains(key, '\\') {
		return false
	}
	var s string
	return json.Unmarshal(key, &s) == nil && s == name
}

// jsonText returns the decoded string that b holds.
func jsonText(b []byte) (string, bool) {
	var s string
	if len(b) == 0 || b[0] != '"' || json.Unmarshal(b, &s) != nil {
		return "", false
	}
	return s, true
}

func jsonSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// jsonString returns the end of the string that begins at i.
func jsonString(b []byte, i int) int {
	for i++; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(b)
}

// jsonValue returns the end of the value that begins at i.
func jsonValue(b []byte, i int) int {
	depth := 0
	for i < len(b) {
		switch b[i] {
		case '"':
			i = jsonString(b, i)
		case '{', '[':
			depth++
			i++
			continue
		case '}', ']':
			if depth == 0 {
				return i
			}
			depth--
			i++
		case ',', ':', ' ', '\n', '\r', '\t':
			if depth == 0 {
				return i
			}
			i++
			continue
		default:
			for i < len(b) && !jsonDelimiter(b[i]) {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
	return i
}

func jsonDelimiter(c byte) bool {
	switch c {
	case '"', '{', '}', '[', ']', ',', ':', ' ', '\n', '\r', '\t':
		return true
	}
	return false
}
