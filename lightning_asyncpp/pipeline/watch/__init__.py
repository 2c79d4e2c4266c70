"""All ranks watch over each other: whichever dies, stops or raises, all end soon, and all say which was the first."""
